//! How the emulator's other libraries reach the device, which is the driver's: by functions that
//! `libcuda.so` exports beside the driver's own.

#![allow(unsafe_code)] // takes functions from a library

use crate::queue::{Ready, Run};
use std::ffi::{CStr, c_int, c_void};

/// The driver's functions for other libraries.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    /// Puts work on a stream: `emulated_put`.
    pub put: extern "C" fn(*mut c_void, Run, *mut c_void) -> c_int,
    /// Puts work of several streams on one of them: `emulated_meet`.
    pub meet: extern "C" fn(*mut c_void, Ready, Run, *mut c_void) -> c_int,
    /// Tells that what such work waits for has changed: `emulated_wake`.
    pub wake: extern "C" fn(),
    /// The GPU of this thread: `emulated_device`.
    pub device: extern "C" fn() -> c_int,
    /// Host address of bytes of the device, or null: `emulated_address`.
    pub address: extern "C" fn(u64, usize) -> *mut u8,
}

/// The driver that this process has opened, if it is the emulator's.
pub fn driver() -> Option<Driver> {
    // SAFETY: the driver is open, as its caller has a stream or a context; these are its functions'
    // types.
    unsafe {
        let handle = libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW);
        if handle.is_null() {
            return None;
        }
        let find = |name: &CStr| {
            let found = libc::dlsym(handle, name.as_ptr());
            (!found.is_null()).then_some(found)
        };
        Some(Driver {
            put: std::mem::transmute::<
                *mut c_void,
                extern "C" fn(*mut c_void, Run, *mut c_void) -> c_int,
            >(find(c"emulated_put")?),
            meet: std::mem::transmute::<
                *mut c_void,
                extern "C" fn(*mut c_void, Ready, Run, *mut c_void) -> c_int,
            >(find(c"emulated_meet")?),
            wake: std::mem::transmute::<*mut c_void, extern "C" fn()>(find(c"emulated_wake")?),
            device: std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(find(
                c"emulated_device",
            )?),
            address: std::mem::transmute::<*mut c_void, extern "C" fn(u64, usize) -> *mut u8>(
                find(c"emulated_address")?,
            ),
        })
    }
}
