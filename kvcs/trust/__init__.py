"""Who is believed, who may ask, and what relays cannot read: scopes, sealing, tokens."""
