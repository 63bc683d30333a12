//! Values as Python writes them.

/// A string literal.
pub(super) fn string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out += "\\n",
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A tuple: `()`, `(1,)`, `(1, 2)`.
pub(super) fn tuple(items: &[String]) -> String {
    match items {
        [one] => format!("({one},)"),
        _ => format!("({})", items.join(", ")),
    }
}

/// A list.
pub(super) fn list(items: &[String]) -> String {
    format!("[{}]", items.join(", "))
}

/// Names of layers: a list, or a comprehension where they are numbered in a row.
pub(super) fn layers(names: &[String]) -> String {
    let number = |name: &String| -> Option<(String, u64)> {
        let (scope, number) = name.rsplit_once('.')?;
        Some((scope.to_string(), number.parse().ok()?))
    };
    let numbers: Option<Vec<(String, u64)>> = names.iter().map(number).collect();
    if let Some(numbers) = numbers
        && let [(scope, first), .., (_, last)] = &numbers[..]
        && numbers
            .iter()
            .zip(*first..)
            .all(|((s, n), i)| s == scope && *n == i)
    {
        return format!("[f\"{scope}.{{i}}\" for i in range({first}, {})]", last + 1);
    }
    list(&names.iter().map(|n| string(n)).collect::<Vec<_>>())
}

/// Numbers as ranges: `[*range(0, 12), 14]`.
pub(super) fn numbers(numbers: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => parts.push((n, n)),
        }
    }
    let part = |(first, last): (usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("*range({first}, {})", last + 1),
    };
    list(&parts.into_iter().map(part).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_in_a_row_are_counted() {
        let names = |all: &[&str]| all.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let row = layers(&names(&["h.2", "h.3", "h.4"]));
        assert_eq!(row, "[f\"h.{i}\" for i in range(2, 5)]");
        assert_eq!(layers(&names(&["h.2", "h.4"])), "[\"h.2\", \"h.4\"]");
        assert_eq!(layers(&names(&["embed"])), "[\"embed\"]");
        assert_eq!(
            numbers(&[0, 1, 2, 5, 7, 8]),
            "[*range(0, 3), 5, *range(7, 9)]"
        );
        assert_eq!(string("a\"b\\"), "\"a\\\"b\\\\\"");
    }
}
