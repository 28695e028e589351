"""The way in and out: checkpoints that others wrote, and copies of ours that others read.

A :mod:`source <ckpt.foreign.source>` gives any checkpoint as tensors cut in pieces and values as bytes;
:mod:`adopt <ckpt.foreign.adopt>` commits one as a step of a run, :mod:`export <ckpt.foreign.export>` writes one as
safetensors, ``torch.save`` or plain DCP. No byte of a file is run as code, and memory is bounded by pieces.
"""
