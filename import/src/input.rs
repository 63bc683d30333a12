//! Files that are read.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;

/// Opens a regular file. Fails for pipes, which would be waited for until somebody writes to them,
/// and for devices, which may have no end; a folder fails where it is read.
pub(crate) fn open(path: &Path) -> Result<File> {
    let kind = std::fs::metadata(path)?.file_type();
    match kind.is_file() || kind.is_dir() {
        true => File::open(path),
        false => Err(Error::new(
            ErrorKind::InvalidInput,
            "it is a pipe or a device, and no regular file",
        )),
    }
}
