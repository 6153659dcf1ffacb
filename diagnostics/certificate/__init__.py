"""The certificate's parts: exact enumeration, laws of the loop, identity, injected faults, and the page."""
