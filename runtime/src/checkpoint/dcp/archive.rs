//! One tensor as `torch.save` writes it: a zip archive, not compressed, of a pickle that says what
//! the tensor is and a file with its elements. In a checkpoint such archives stand one after another in a
//! file.

use super::pickle::{At, Class, Pickle, Writer};
use std::io::{self, Read, Seek, SeekFrom, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Longest pickle of a tensor.
const LONGEST_PICKLE: u64 = 1 << 16;
/// From so many bytes on an archive needs longer fields.
const LARGE: u64 = 1 << 31;

/// A tensor in an archive, whose elements lie in one piece.
#[derive(Debug, PartialEq)]
pub(super) struct Stored {
    /// The type, as PyTorch names it.
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    /// Byte of the archive where the elements begin.
    pub at: u64,
}

/// Reads what the archive is of. Fails where it is not what [`write`] or `torch.save` makes of a
/// tensor that is contiguous.
pub(super) fn read(archive: impl Read + Seek) -> Result<Stored, String> {
    let broken = |e: zip::result::ZipError| format!("no archive of a tensor, or damaged: {e}");
    let mut archive = ZipArchive::new(archive).map_err(broken)?;
    let names: Vec<String> = (0..archive.len())
        .filter_map(|i| Some(archive.by_index_raw(i).ok()?.name().to_string()))
        .collect();
    let mut pickles = names.iter().filter_map(|n| n.strip_suffix("/data.pkl"));
    let folder = pickles.next().ok_or("the archive has no data.pkl")?;
    let mut entry = |name: &str| -> Result<(Vec<u8>, u64, u64), String> {
        let name = format!("{folder}/{name}");
        let mut file = archive.by_name(&name).map_err(broken)?;
        if file.compression() != CompressionMethod::Stored {
            return Err(format!("{name} is compressed"));
        }
        let (at, mut bytes, size) = (file.data_start(), Vec::new(), file.size());
        // The elements are read where they are wanted.
        if size <= LONGEST_PICKLE {
            (&mut file)
                .take(LONGEST_PICKLE)
                .read_to_end(&mut bytes)
                .map_err(|e| e.to_string())?;
        }
        Ok((bytes, at, size))
    };
    if let Ok((order, ..)) = entry("byteorder")
        && order != b"little"
    {
        return Err("its bytes are in another order than this machine's".into());
    }
    let (pickle, _, size) = entry("data.pkl")?;
    if size > LONGEST_PICKLE {
        return Err(format!(
            "data.pkl has {size} bytes: it is of more than a tensor"
        ));
    }
    let tensor = Tensor::of(&Pickle::read(&pickle)?)?;
    let (_, at, size) = entry(&format!("data/{}", tensor.key))?;
    let width = width(tensor.dtype);
    let elements = tensor.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    let first = tensor.first.checked_mul(width);
    let needed = elements.and_then(|n| n.checked_mul(width)?.checked_add(first?));
    match (needed, first) {
        (Some(needed), Some(first)) if needed <= size => Ok(Stored {
            dtype: tensor.dtype,
            shape: tensor.shape,
            at: at + first,
        }),
        _ => Err(format!(
            "{} {:?} is more than the {size} bytes that are there",
            tensor.dtype, tensor.shape
        )),
    }
}

/// The pickle of a tensor.
struct Tensor {
    dtype: &'static str,
    shape: Vec<u64>,
    /// The file of its elements, and the first of them.
    key: String,
    first: u64,
}

impl Tensor {
    fn of(p: &Pickle) -> Result<Self, String> {
        let other = || "data.pkl is of something else than a tensor".to_string();
        let (args, _) = p.made(p.root(), Class::Rebuild).ok_or_else(other)?;
        let &[storage, first, shape, strides, ..] = args else {
            return Err(other());
        };
        let super::pickle::Node::Beside(id) = p.node(storage) else {
            return Err(other());
        };
        let &[_, dtype, key, ..] = p.tuple(*id).ok_or_else(other)? else {
            return Err(other());
        };
        let super::pickle::Node::Class(Class::Type(dtype)) = p.node(dtype) else {
            return Err(other());
        };
        let [shape, strides] = [shape, strides].map(|all| lens(p, all));
        let (shape, strides) = shape.zip(strides).ok_or_else(other)?;
        if !is_contiguous(&shape, &strides) {
            return Err(format!(
                "a tensor {shape:?} with strides {strides:?} is not in one piece: save what `contiguous()` makes of it"
            ));
        }
        Ok(Tensor {
            dtype,
            shape,
            key: p.text(key).ok_or_else(other)?.to_string(),
            first: p
                .int(first)
                .and_then(|n| n.try_into().ok())
                .ok_or_else(other)?,
        })
    }
}

/// A tuple of lengths, or an object that has one as its only argument.
pub(super) fn lens(p: &Pickle, at: At) -> Option<Vec<u64>> {
    let inner = p.made(at, Class::Size).and_then(|(args, _)| match args {
        [inner] => Some(*inner),
        _ => None,
    });
    let items = p.tuple(inner.unwrap_or(at))?;
    if items.len() > MOST_DIMS {
        return None;
    }
    let len = |at: &At| u64::try_from(p.int(*at)?).ok();
    items.iter().map(len).collect()
}

/// Most dims of a tensor, as PyTorch has it.
const MOST_DIMS: usize = 64;

fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut expected = 1u64;
    let dims = shape.iter().zip(strides).rev();
    shape.len() == strides.len()
        && dims.into_iter().all(|(&len, &stride)| {
            let fits = len <= 1 || stride == expected;
            expected = expected.saturating_mul(len.max(1));
            fits
        })
}

/// Bytes of an element.
fn width(dtype: &str) -> u64 {
    match dtype {
        "float64" | "int64" => 8,
        "float32" | "int32" => 4,
        "float16" | "bfloat16" | "int16" => 2,
        _ => 1,
    }
}

/// Writes a tensor's archive where the file stands; `copy` writes its elements, row-major. Returns
/// the archive's length.
pub(super) fn write<W: Write + Seek>(
    out: &mut W,
    (dtype, storage): (&str, &str),
    shape: &[u64],
    copy: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<u64> {
    let elements = shape.iter().product::<u64>();
    let base = out.stream_position()?;
    let mut archive = ZipWriter::new(Behind { inner: out, base });
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let small: [(&str, &[u8]); 3] = [
        ("data.pkl", &pickle(storage, elements, shape)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ];
    for (name, bytes) in small {
        archive.start_file(format!("archive/{name}"), options)?;
        archive.write_all(bytes)?;
    }
    let is_large = elements.saturating_mul(width(dtype)) >= LARGE;
    // As PyTorch has it, so that a file can be mapped.
    let options = options.large_file(is_large).with_alignment(64);
    archive.start_file("archive/data/0", options)?;
    copy(&mut archive)?;
    let mut done = archive.finish()?;
    let end = done.seek(SeekFrom::End(0))?;
    Ok(end)
}

fn pickle(storage: &str, elements: u64, shape: &[u64]) -> Vec<u8> {
    let mut strides: Vec<u64> = Vec::with_capacity(shape.len());
    let mut stride = 1;
    for len in shape.iter().rev() {
        strides.push(stride);
        stride *= (*len).max(1);
    }
    strides.reverse();
    let mut w = Writer::new();
    w.class("torch._utils", "_rebuild_tensor_v2");
    w.call(|w| {
        w.tuple(|w| {
            w.text("storage");
            w.class("torch", storage);
            w.text("0");
            w.text("cpu");
            w.int(elements);
        });
        w.beside();
        w.int(0);
        w.ints(shape);
        w.ints(&strides);
        w.no();
        w.class("collections", "OrderedDict");
        w.call(|_| ());
    });
    w.end()
}

/// The part of a file behind a place.
struct Behind<'a, W> {
    inner: &'a mut W,
    base: u64,
}

impl<W: Write> Write for Behind<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<W: Seek> Seek for Behind<'_, W> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(n) => SeekFrom::Start(self.base + n),
            other => other,
        };
        Ok(self.inner.seek(to)?.saturating_sub(self.base))
    }
}

/// A stretch of a file.
pub(super) struct Stretch<R> {
    inner: R,
    base: u64,
    len: u64,
    at: u64,
}

impl<R: Seek> Stretch<R> {
    pub fn new(mut inner: R, base: u64, len: u64) -> io::Result<Self> {
        inner.seek(SeekFrom::Start(base))?;
        Ok(Stretch {
            inner,
            base,
            len,
            at: 0,
        })
    }
}

impl<R: Read> Read for Stretch<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.len.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let n = out.len().min(left);
        let n = self.inner.read(&mut out[..n])?;
        self.at += n as u64;
        Ok(n)
    }
}

impl<R: Seek> Seek for Stretch<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(n) => Some(n),
            SeekFrom::End(n) => self.len.checked_add_signed(n),
            SeekFrom::Current(n) => self.at.checked_add_signed(n),
        };
        let beyond = || io::Error::new(io::ErrorKind::InvalidInput, "before the beginning");
        let at = at.ok_or_else(beyond)?;
        let place = self.base.checked_add(at).ok_or_else(beyond)?;
        self.inner.seek(SeekFrom::Start(place))?;
        self.at = at;
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    #[test]
    fn a_tensor_is_read_as_it_was_written() {
        let values: Vec<f32> = (0..24).map(|i| i as f32 / 7.0).collect();
        let mut file = Cursor::new(b"what stands before it".to_vec());
        let base = file.seek(SeekFrom::End(0)).unwrap();
        let shape = [2, 3, 4];
        let n = write(&mut file, ("float32", "FloatStorage"), &shape, |out| {
            out.write_all(bytemuck::cast_slice(&values))
        });
        let n = n.unwrap();
        file.write_all(b"what stands behind it").unwrap();
        let bytes = file.into_inner();
        let stored = read(Stretch::new(Cursor::new(&bytes), base, n).unwrap()).unwrap();
        assert_eq!((stored.dtype, &stored.shape[..]), ("float32", &shape[..]));
        let at = (base + stored.at) as usize;
        let elements: &[u8] = bytemuck::cast_slice(&values);
        assert_eq!(&bytes[at..at + 96], elements);
        assert_eq!(stored.at % 64, 0);
    }

    #[test]
    fn tensors_that_are_not_in_one_piece_are_told() {
        assert!(is_contiguous(&[2, 3], &[3, 1]));
        assert!(is_contiguous(&[2, 1, 3], &[3, 77, 1]));
        assert!(is_contiguous(&[], &[]));
        assert!(!is_contiguous(&[2, 3], &[1, 2]));
        assert!(!is_contiguous(&[2, 3], &[3]));
    }
}
