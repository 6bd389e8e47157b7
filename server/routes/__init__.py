"""HTTP endpoints, a module per resource."""
