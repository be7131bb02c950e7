"""The network: loading it, the map to the hub checkpoint's names, and the experts that its routers choose."""
