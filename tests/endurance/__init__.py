"""Train random cases for hours, disturbed in every way, and compare each with an undisturbed run: see __main__.py."""
