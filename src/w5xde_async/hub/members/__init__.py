"""Who is here: sessions, the roster, liveness, credentials, access, programs. The door is ``roster``."""
