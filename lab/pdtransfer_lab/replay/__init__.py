"""Replays a trace of requests against an OpenAI-compatible endpoint, and shows what a replay or the model found."""
