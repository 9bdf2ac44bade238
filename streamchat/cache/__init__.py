"""The sink cache: `layout` decides in integers, `blocks` in masks, `sink` moves the tensors.

`static` is one decode step of it that a CUDA graph can hold.
"""
