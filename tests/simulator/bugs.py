from contextlib import contextmanager

BUGS = {}


@contextmanager
def planted(name):
    yield
