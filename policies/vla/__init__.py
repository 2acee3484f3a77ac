"""Vision-language-action policy: π0 of transformers (``pi0``), its tokenizer and files (``checkpoint``).

Importing this package does not import transformers, which takes seconds; importing ``policy`` does.
"""
