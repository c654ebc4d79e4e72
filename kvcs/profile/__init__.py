"""The KVCS draft as values: names, Object payloads, manifests, signatures. No I/O but key files."""
