"""Whether every model type of transformers splits: ``python -m tests.coverage`` tries them all."""
