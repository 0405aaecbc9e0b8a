"""One suite per kind of backend; ``test_KIND.py`` is collected only when that kind is asked for."""
