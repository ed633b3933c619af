"""The actors of one process. They know the store's protocols, and none of its implementations."""
