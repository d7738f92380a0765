"""How fast a sync is, always next to a plain memory copy of the same bytes in the same minute."""
