"""How leases are computed: the protocol that a connection drives, and what implements it."""
