"""C++ kernels for the CPU: the sources, and how they are compiled at first use and loaded."""
