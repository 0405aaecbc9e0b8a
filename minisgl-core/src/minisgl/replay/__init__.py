"""Running a trace again, and saying where behaviour differs."""
