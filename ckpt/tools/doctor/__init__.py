"""What ``ckpt doctor`` looks at: the installation, and a storage. No torch, no click."""
