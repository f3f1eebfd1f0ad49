"""What every engine has around its model: requests in turn, pages, cells, batches, first tokens, ends.

A model computes a chunk of a prompt (`prefill.PrefillModel`), or a step of a batch (`decode.DecodeModel`), and knows
nothing of other requests, pages or ends. PrefillShell and DecodeShell make engines of them.
"""
