"""What an inference engine embeds: a client for prefill and a client for decode, with threads or for asyncio."""
