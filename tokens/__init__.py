"""From text to the batch of a step.

text files    sources.py      which files --source names
    |         documents.py    their texts, in chunks
    |         tokenizer.py    GPT-2's encoding
    v         shard_writer.py chunks to full shards
shards        shards.py       the file formats and the manifest
    v         loader.py       the order of data, and the tokens of each step
batches       prefetch.py     a thread that produces items before they are needed
"""
