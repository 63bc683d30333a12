//! Options by which matmuls of some ops run in another type than the others: `wide=h.*.attn.*` leaves
//! these in the activations' type, `mxfp8=h.*.mamba.out` runs those in eight bits. Ops are named by their
//! paths, with `*` for any characters and `[74-87]` for a number of these.

use crate::software::is_narrow;

/// The option for the activations' type.
const WIDE: &str = "wide";
/// The most numbers that a pattern stands for.
const MOST: u64 = 4096;

/// A type of matmuls by its option, none for the activations', and the ops that run in it.
#[derive(Debug, PartialEq)]
pub(crate) struct Excepted<'a> {
    pub(crate) narrow: Option<&'a str>,
    /// Patterns that are plain but for `*`.
    pub(crate) ops: Vec<String>,
}

/// Reads an option; none where it is of another kind. The error says what is wrong with its pattern.
pub(crate) fn read(option: &str) -> Result<Option<Excepted<'_>>, String> {
    let Some((kind, pattern)) = option.split_once('=') else {
        return Ok(None);
    };
    let narrow = match kind {
        WIDE => None,
        kind if is_narrow(kind) => Some(kind),
        _ => return Ok(None),
    };
    let ops = spelled(pattern).map_err(|why| format!("`{option}`: {why}"))?;
    Ok(Some(Excepted { narrow, ops }))
}

/// A pattern for each number that `[a-b]` stands for.
fn spelled(pattern: &str) -> Result<Vec<String>, String> {
    if pattern.is_empty() {
        return Err("no ops; name them by their paths, as in h.*.attn.*".into());
    }
    let Some((before, rest)) = pattern.split_once('[') else {
        return Ok(vec![pattern.into()]);
    };
    let numbers = rest.split_once(']').and_then(|(range, behind)| {
        let (first, last) = range.split_once('-')?;
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        let fits = first <= last && last - first < MOST && !behind.contains('[');
        fits.then_some((first..=last, behind))
    });
    let (numbers, behind) = numbers.ok_or("expected one range of numbers, as in h.[74-87].*")?;
    Ok(numbers.map(|n| format!("{before}{n}{behind}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_name_a_type_and_ops() {
        let found = |narrow, ops: &[&str]| {
            let ops = ops.iter().map(|op| op.to_string()).collect();
            Ok(Some(Excepted { narrow, ops }))
        };
        assert_eq!(read("wide=h.*.attn.*"), found(None, &["h.*.attn.*"]));
        assert_eq!(read("mxfp8=h.*.out"), found(Some("mxfp8"), &["h.*.out"]));
        assert_eq!(read("wide=h.[8-9].*"), found(None, &["h.8.*", "h.9.*"]));
        assert_eq!(read("attention=cudnn"), Ok(None));
        assert_eq!(read("mxfp8"), Ok(None));
        assert!(
            read("wide=")
                .unwrap_err()
                .contains("name them by their paths")
        );
        for wrong in [
            "h.[9-8].*",
            "h.[a-b]",
            "h.[1-2",
            "h.[1-2].[3-4]",
            "h.[0-9999]",
        ] {
            let said = read(&format!("wide={wrong}")).unwrap_err();
            assert!(said.contains("one range of numbers"), "{wrong}: {said}");
        }
    }
}
