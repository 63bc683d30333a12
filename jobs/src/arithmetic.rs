//! Whole numbers of `$((..))`: sums, products and parentheses, with variables put in.

/// How deep parentheses may stand in each other.
const DEEPEST: usize = 64;

/// The value of an expression; none where it is none of these, divides by zero or overflows.
pub(crate) fn value(text: &str) -> Option<i64> {
    let mut rest: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    rest.reverse();
    let value = sum(&mut rest, 0)?;
    rest.is_empty().then_some(value)
}

/// The characters that are left to read, the next one last.
type Rest = Vec<char>;

fn sum(rest: &mut Rest, depth: usize) -> Option<i64> {
    let mut value = product(rest, depth)?;
    while let Some(c @ ('+' | '-')) = rest.last().copied() {
        rest.pop();
        let next = product(rest, depth)?;
        value = match c {
            '+' => value.checked_add(next)?,
            _ => value.checked_sub(next)?,
        };
    }
    Some(value)
}

fn product(rest: &mut Rest, depth: usize) -> Option<i64> {
    let mut value = factor(rest, depth)?;
    while let Some(c @ ('*' | '/' | '%')) = rest.last().copied() {
        rest.pop();
        let next = factor(rest, depth)?;
        value = match c {
            '*' => value.checked_mul(next)?,
            '/' => value.checked_div(next)?,
            _ => value.checked_rem(next)?,
        };
    }
    Some(value)
}

fn factor(rest: &mut Rest, depth: usize) -> Option<i64> {
    if depth > DEEPEST {
        return None;
    }
    match rest.last()? {
        '(' => {
            rest.pop();
            let value = sum(rest, depth + 1)?;
            (rest.pop()? == ')').then_some(value)
        }
        '-' => {
            rest.pop();
            factor(rest, depth + 1)?.checked_neg()
        }
        _ => {
            let mut digits = String::new();
            while let Some(c) = rest.last().copied().filter(char::is_ascii_digit) {
                rest.pop();
                digits.push(c);
            }
            digits.parse().ok()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::value;

    #[test]
    fn whole_numbers_as_the_shell_has_them() {
        assert_eq!(value("8 * 4"), Some(32));
        assert_eq!(value("(2+3)*-4 - 7/2"), Some(-23));
        assert_eq!(value("17 % 5"), Some(2));
        for wrong in ["", "1 +", "a", "1/0", "(1", "9223372036854775807+1", "1 1+"] {
            assert_eq!(value(wrong), None, "{wrong}");
        }
        assert_eq!(value(&"(".repeat(10_000)), None);
        assert_eq!(value(&"-".repeat(10_000)), None);
    }
}
