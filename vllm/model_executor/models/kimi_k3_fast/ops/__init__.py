"""The operators: one folder each with its host half, its reference and its kernels. `index.py` lists every kernel."""
