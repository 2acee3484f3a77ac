"""Vision-language-action policy: π0 of transformers (``pi0``), its words (``text``) and files (``checkpoint``).

Importing this does not import transformers, which takes seconds; ``policy`` does.
"""
