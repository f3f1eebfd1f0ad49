"""What every engine needs around its model: an order of requests, pages, cells, batches, first tokens, ends.

A model computes a chunk of a prompt (`prefill.PrefillModel`), or a step of a batch (`decode.DecodeModel`), and has
no part in other requests, pages or ends. PrefillShell and DecodeShell make engines of them.
"""
