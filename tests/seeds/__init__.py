"""What the documents of W5XDE and Guava say, item by item (``items.txt``), and their snippets.

python -m tests.seeds
"""
