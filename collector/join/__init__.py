"""Step sequences, request journeys and KV events become interval rows."""
