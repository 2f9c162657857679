"""The backend of chunkrt's own kernels; needs the native module."""
