"""An HTTP server over one engine: `kvpager serve`; needs the packages of the extra `serve`."""
