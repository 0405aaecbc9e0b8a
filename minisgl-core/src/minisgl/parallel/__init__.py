"""The ranks of an offline engine: one in this process, or several in processes of their own."""
