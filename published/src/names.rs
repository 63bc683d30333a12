//! Names that are not known, and the one that may have been meant.

/// Names that are more like each other than this may have been meant (Jaro and Winkler's measure).
const LIKE: f64 = 0.8;

/// The name most like `wanted` but for capitals, if any is like it at all; ties go to the first.
pub fn closest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = wanted.to_lowercase();
    let like = |name: &str| strsim::jaro_winkler(&wanted, &name.to_lowercase());
    let mut best: Option<(f64, &str)> = None;
    for name in names {
        let how = like(name);
        if how > best.map_or(LIKE, |(most, _)| most) {
            best = Some((how, name));
        }
    }
    best.map(|(_, name)| name)
}

/// The question after the name that was meant, where there is one; to stand behind a name.
pub fn meant(near: Option<&str>) -> String {
    near.map_or(String::new(), |n| format!(" (did you mean `{n}`?)"))
}
