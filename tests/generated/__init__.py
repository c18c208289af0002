"""Jobs and runs that nobody has thought of: drawn from a seed, run by real coordinators and workers in virtual time.

``python -m tests.generated --seeds 0:5000`` draws and runs as many, and prints what fails, made small, as code.
``scenario`` says what is drawn, ``jobs`` makes the job of it, ``runner`` runs it and says what does not hold.
"""
