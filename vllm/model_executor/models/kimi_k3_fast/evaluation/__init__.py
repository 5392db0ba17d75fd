"""The accuracy gate: tasks through lm-eval, an account of every request, and the guard's account of every step.

Needs lm-eval (`requirements/eval.txt`); nothing of it is imported with the package.
"""
