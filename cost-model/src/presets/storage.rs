//! Storage of the presets, embedded from `clusters/storage.toml`.

use ir::storage::Storage;
use serde::Deserialize;
use std::collections::BTreeMap;

const STORAGE: &str = include_str!("../../../clusters/storage.toml");

/// How hosts write, and how devices copy to them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StorageFile {
    hosts: Hosts,
    devices: Vec<OfDevice>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hosts {
    write_bytes_per_s: f64,
    source: String,
}

/// Devices whose names begin with `device`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OfDevice {
    device: String,
    bytes_per_s: f64,
    source: String,
}

impl StorageFile {
    /// The embedded file; the error names it and what the parser says.
    pub(super) fn read() -> Result<StorageFile, String> {
        toml::from_str(STORAGE).map_err(|e| format!("clusters/storage.toml: {e}"))
    }

    /// Storage of hosts with this device, and its sources; nothing for a device that the file
    /// does not know.
    pub(super) fn of(
        &self,
        device: &str,
        sources: &mut BTreeMap<String, String>,
    ) -> Option<Storage> {
        let known = |d: &&OfDevice| device.starts_with(&d.device);
        let link = self.devices.iter().find(known)?;
        let mut say = |key: &str, source: &str| {
            sources.insert(format!("storage.{key}"), source.to_string());
        };
        say("device_to_host_bytes_per_s", &link.source);
        say("host_write_bytes_per_s", &self.hosts.source);
        Some(Storage {
            device_to_host_bytes_per_s: link.bytes_per_s,
            host_write_bytes_per_s: self.hosts.write_bytes_per_s,
            total_write_bytes_per_s: None,
            host_memory_bytes: None,
            host_file_bytes: None,
        })
    }
}
