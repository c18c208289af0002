"""The run in a browser: what it has come to (view), who watches it (feed), who may (access), and the server itself."""
