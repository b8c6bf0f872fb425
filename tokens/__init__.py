"""From text to the shards that training/loader.py reads.

text files    sources.py      which files --source names
    |         documents.py    their texts, in chunks
    |         tokenizer.py    GPT-2's encoding
    v         shards.py       chunks to full shards, the file formats, the manifest
shards
    v  training/loader.py     the order of data, and the tokens of each step
batches       prefetch.py     a thread that produces items before they are needed
"""
