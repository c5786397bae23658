"""An HTTP server over one engine: `kvpager serve`; needs `pip install 'kvpager[serve]'`."""
