"""A snapshot as an image in the OCI formats (image-spec 1.0): pure `groups` and `image`, `tar` bytes, a `layout` on the disk, `oci`."""
