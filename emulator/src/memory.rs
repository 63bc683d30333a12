//! Device memory: host memory behind addresses that the host may not touch.

#![allow(unsafe_code)] // maps and unmaps memory, and copies between addresses it has checked

use std::collections::BTreeMap;

/// Bit of device addresses: with it an address is none that the processor accepts.
const TAG: u64 = 1 << 62;
/// The bytes that fresh memory is full of: NaN in every type of floats, -1 in integers.
const POISON: u8 = 0xff;

/// The blocks of memory that are allocated, by device address.
#[derive(Debug, Default)]
pub struct Memory {
    blocks: BTreeMap<u64, usize>,
}

impl Memory {
    /// Allocates poisoned memory; none where the system has not that much.
    pub fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let (size, access) = (bytes.max(1), libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping disturbs no other one.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the mapping is ours, writable and of this size.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), POISON, size) };
        let address = at as u64 | TAG;
        self.blocks.insert(address, size);
        Some(address)
    }

    /// Frees a block; false when it is none. Its pages are gone at once.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(size) = self.blocks.remove(&address) else {
            return false;
        };
        // SAFETY: the block was mapped by `allocate` and is no longer listed.
        unsafe { libc::munmap((address & !TAG) as *mut libc::c_void, size) };
        true
    }

    /// The host address of bytes that all lie in one block.
    pub fn resolve(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let (start, size) = self.blocks.range(..=address).next_back()?;
        let end = address.checked_add(bytes)?;
        (end <= start + *size as u64).then_some((address & !TAG) as *mut u8)
    }

    /// Bytes of all blocks.
    pub fn used(&self) -> usize {
        self.blocks.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_poisoned_and_found_by_its_addresses_alone() {
        let mut memory = Memory::default();
        let at = memory.allocate(100).expect("there is memory");
        assert!(at >= TAG);
        let host = memory.resolve(at + 10, 90).expect("it is in the block");
        // SAFETY: resolved for 90 bytes.
        assert!(
            unsafe { std::slice::from_raw_parts(host, 90) }
                .iter()
                .all(|b| *b == POISON)
        );
        assert!(memory.resolve(at + 10, 91).is_none());
        assert!(memory.resolve(at & !TAG, 1).is_none());
        assert!(memory.free(at) && !memory.free(at));
        assert!(memory.resolve(at, 1).is_none());
        assert_eq!(memory.used(), 0);
    }
}
