"""The router in front of HTTP servers, such as vLLM's: each request is posted to a prefill and a decode server."""
