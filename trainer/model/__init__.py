"""The AlphaFold 3 training network: modules named as the supplement's algorithms."""
