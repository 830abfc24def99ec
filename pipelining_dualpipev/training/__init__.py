"""The main job: train a Hugging Face model on the V, from text to a checkpoint that plain transformers opens.

::

    config.py    what can be asked for, and what is refused
    launch.py    starts the ranks, unless torchrun has; ends them all together
    loop.py      what one rank does
      text.py    which files to train on, and which to hold out
      data.py    tokens, batches, the held-out loss and the bigram baseline beside it
      model.py   a local directory or a small built-in configuration
"""
