"""A packed model: the checkpoint rearranged so that it can be served, one directory per model.

    manifest.json                 what the pack was made from, the layout of the records, sizes and checksums
    dense-NNN.safetensors         everything but the experts, in the checkpoint's types
    experts.bin                   one aligned record per expert
    draft-<precision>/            the experts quantized, made when a precision is first asked for
        manifest.json                 sizes and checksums
        NNN.safetensors               one layer each
    config.json, tokenizer.json, ...  so that the pack can be served by itself

A pack that exists is complete, and has one writer at a time (see `engine.directory`). Packing and quantizing hold about
one layer in memory and keep a journal, so that an interrupted run goes on at the layer where it stopped.
"""

from engine.packing.draft import Draft, ensure_draft
from engine.packing.pack import Pack, ensure_pack, find_records, is_pack, pack_dtype

__all__ = ["Draft", "Pack", "ensure_draft", "ensure_pack", "find_records", "is_pack", "pack_dtype"]
