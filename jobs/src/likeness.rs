//! Names that may have been meant by one that is not known.

/// The likeness from which on a name may have been meant: of ten characters two may differ.
const LIKE: f64 = 0.75;

/// The name that is most like `wanted`, by the share of characters that stay (Damerau and
/// Levenshtein's distance), if one is like it at all; of equally like ones the first.
pub fn closest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |name: &str| name.to_lowercase().replace('_', "-");
    let wanted = plain(wanted);
    let mut best: Option<(f64, &str)> = None;
    for name in names {
        let own = plain(name);
        // Names of other lengths are none; it saves the measure, which takes time.
        let (a, b) = (wanted.len().min(own.len()), wanted.len().max(own.len()));
        if (a as f64) < LIKE * b as f64 || b > LONGEST {
            continue;
        }
        let like = strsim::normalized_damerau_levenshtein(&wanted, &own);
        if like >= LIKE && best.is_none_or(|(most, _)| like > most) {
            best = Some((like, name));
        }
    }
    best.map(|(_, name)| name)
}

/// Names of more characters are not compared.
const LONGEST: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_like_what_was_meant() {
        let names = [
            "tensor-model-parallel-size",
            "sequence-parallel",
            "bf16",
            "seed",
        ];
        let of = |wanted| closest(wanted, names.into_iter());
        assert_eq!(of("tensor-model-paralel-size"), Some(names[0]));
        assert_eq!(of("tensor_parallel_size"), Some(names[0]));
        assert_eq!(of("seqence-parallel"), Some(names[1]));
        assert_eq!(of("make-it-fast"), None);
        assert_eq!(of("speed"), Some("seed"));
        assert_eq!(of(&"x".repeat(1000)), None);
    }
}
