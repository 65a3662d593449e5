"""The papers' tables beside ours. Nothing in the compiler imports them."""
