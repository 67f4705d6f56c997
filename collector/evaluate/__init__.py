"""The bench: modelling systems side by side on recordings; nothing that serves imports it."""
