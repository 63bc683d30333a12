//! Patterns of paths, by which pins and options of software name ops and values.

/// Whether `text` matches `pattern`, in which `*` stands for any characters. Linear backtracking.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (g, t) = (pattern.as_bytes(), text.as_bytes());
    let (mut i, mut j, mut star, mut mark) = (0, 0, None, 0);
    while j < t.len() {
        if i < g.len() && g[i] == b'*' {
            star = Some(i);
            mark = j;
            i += 1;
        } else if i < g.len() && g[i] == t[j] {
            i += 1;
            j += 1;
        } else if let Some(s) = star {
            i = s + 1;
            mark += 1;
            j = mark;
        } else {
            return false;
        }
    }
    g[i..].iter().all(|&c| c == b'*')
}
