//! Memory beside the devices': of hosts, and their files. Checkpoints go there, and buffers may.

use crate::Bytes;
use serde::{Deserialize, Serialize};

/// How fast devices reach the memory and files of their hosts, and what these hold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// Bytes per second from a device to its host's memory while all devices of the host copy.
    pub device_to_host_bytes_per_s: f64,
    /// Bytes per second that one host writes.
    pub host_write_bytes_per_s: f64,
    /// Bytes per second that all hosts write together; absent where every host has storage of
    /// its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_write_bytes_per_s: Option<f64>,
    /// Bytes of a host's memory that programs may use; absent for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_bytes: Option<Bytes>,
    /// Bytes of a host's storage that programs may use; absent for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_file_bytes: Option<Bytes>,
}
