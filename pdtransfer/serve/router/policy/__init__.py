"""Which prefill and which decode worker serve a request: one Protocol, one file a policy."""
