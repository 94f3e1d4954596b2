"""A small corpus of plain facts, with questions that need two passages for the answer.

A capital's passage names the country; a country's passage names the currency, language and continent; a river's passage
names the capitals on the river. So "What is the currency of the country whose capital is Budapest?" leads from the
first passage to the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# country | capital | river on which the capital lies | currency | official language | continent; empty: not asked
TABLE = """
Albania|Tirana||lek|Albanian|Europe
Angola|Luanda||kwanza|Portuguese|Africa
Argentina|Buenos Aires|Río de la Plata|Argentine peso|Spanish|South America
Armenia|Yerevan|Hrazdan|dram|Armenian|Asia
Australia|Canberra|Molonglo|Australian dollar||Oceania
Austria|Vienna|Danube|euro|German|Europe
Bangladesh|Dhaka|Buriganga|taka|Bengali|Asia
Brazil|Brasília||real|Portuguese|South America
Cambodia|Phnom Penh|Mekong|riel|Khmer|Asia
Canada|Ottawa||Canadian dollar||North America
Chile|Santiago|Mapocho|Chilean peso|Spanish|South America
China|Beijing||renminbi||Asia
Colombia|Bogotá||Colombian peso|Spanish|South America
Croatia|Zagreb|Sava|euro|Croatian|Europe
Czechia|Prague|Vltava|koruna|Czech|Europe
Democratic Republic of the Congo|Kinshasa||Congolese franc|French|Africa
Denmark|Copenhagen||krone|Danish|Europe
Egypt|Cairo|Nile|Egyptian pound|Arabic|Africa
Ethiopia|Addis Ababa||birr||Africa
France|Paris|Seine|euro|French|Europe
Germany|Berlin|Spree|euro|German|Europe
Ghana|Accra||cedi|English|Africa
Greece|Athens||euro|Greek|Europe
Hungary|Budapest|Danube|forint|Hungarian|Europe
Iceland|Reykjavík||króna|Icelandic|Europe
India|New Delhi|Yamuna|Indian rupee||Asia
Iran|Tehran||Iranian rial|Persian|Asia
Iraq|Baghdad|Tigris|Iraqi dinar||Asia
Ireland|Dublin|Liffey|euro||Europe
Italy|Rome|Tiber|euro|Italian|Europe
Japan|Tokyo|Sumida|yen|Japanese|Asia
Jordan|Amman||Jordanian dinar|Arabic|Asia
Laos|Vientiane|Mekong|kip|Lao|Asia
Latvia|Riga|Daugava|euro|Latvian|Europe
Lithuania|Vilnius|Neris|euro|Lithuanian|Europe
Malaysia|Kuala Lumpur|Klang|ringgit|Malay|Asia
Mali|Bamako|Niger|West African CFA franc||Africa
Mongolia|Ulaanbaatar|Tuul|tögrög|Mongolian|Asia
Mozambique|Maputo||metical|Portuguese|Africa
Nepal|Kathmandu|Bagmati|Nepalese rupee|Nepali|Asia
Nigeria|Abuja||naira|English|Africa
Norway|Oslo|Akerselva|krone|Norwegian|Europe
Peru|Lima|Rímac|sol||South America
Poland|Warsaw|Vistula|złoty|Polish|Europe
Portugal|Lisbon|Tagus|euro|Portuguese|Europe
Romania|Bucharest|Dâmbovița|leu|Romanian|Europe
Russia|Moscow|Moskva|ruble|Russian|Europe
Saudi Arabia|Riyadh||riyal|Arabic|Asia
Serbia|Belgrade|Danube|Serbian dinar|Serbian|Europe
Slovakia|Bratislava|Danube|euro|Slovak|Europe
Slovenia|Ljubljana|Ljubljanica|euro|Slovene|Europe
South Korea|Seoul|Han|South Korean won|Korean|Asia
Spain|Madrid|Manzanares|euro|Spanish|Europe
Sudan|Khartoum|Nile|Sudanese pound||Africa
Sweden|Stockholm||krona|Swedish|Europe
Syria|Damascus|Barada|Syrian pound|Arabic|Asia
Thailand|Bangkok|Chao Phraya|baht|Thai|Asia
Ukraine|Kyiv|Dnieper|hryvnia|Ukrainian|Europe
United Kingdom|London|Thames|pound sterling|English|Europe
United States|Washington, D.C.|Potomac|United States dollar|English|North America
Uruguay|Montevideo|Río de la Plata|Uruguayan peso|Spanish|South America
Vietnam|Hanoi|Red River|đồng|Vietnamese|Asia
Zambia|Lusaka||kwacha|English|Africa
"""


@dataclass(frozen=True)
class Country:
    """A row of the table; empty fields are not asked about."""

    name: str
    capital: str
    river: str
    currency: str
    language: str
    continent: str

    @property
    def name_in_sentence(self) -> str:
        """Name within a sentence."""
        return f"the {self.name}" if self.name.startswith(("United", "Democratic")) else self.name

    @property
    def passage(self) -> str:
        """Text of the country's passage, without the name of the capital."""
        language = f" Its official language is {self.language}." if self.language else ""
        text = (
            f"{self.name_in_sentence} is a country in {self.continent}. Its currency is the {self.currency}.{language}"
        )
        return text[0].upper() + text[1:]

    @property
    def capital_passage(self) -> str:
        """Text of the capital's passage, without further facts about the country."""
        return f"{self.capital} is the capital of {self.name_in_sentence}."


@dataclass(frozen=True)
class Question:
    """A question and the two passages that answer the question."""

    text: str
    answers: tuple[str, ...]
    chain: tuple[str, str]
    """Titles of the passages, in the order that leads to the answer."""
    country: str


def countries() -> list[Country]:
    """Returns all rows of the table."""
    return [Country(*line.split("|")) for line in TABLE.strip().splitlines()]


def passages() -> dict[str, str]:
    """Returns title → text of all passages."""
    texts, capitals = {}, defaultdict(list)
    for c in countries():
        texts[c.name], texts[c.capital] = c.passage, c.capital_passage
        if c.river:
            capitals[c.river].append(c.capital)
    for river, cities in capitals.items():
        title = river_title(river)
        texts[title] = " ".join(f"{city} lies on the {river}." for city in cities)
    return texts


def river_title(river: str) -> str:
    """Returns a river's title, different from all names of countries (the Niger)."""
    return river if river.startswith("Río") or river.endswith("River") else f"{river} River"


def questions(subjects: Iterable[Country]) -> Iterator[Question]:
    """Yields all questions about the given countries."""
    for c in subjects:
        whose = f"the country whose capital is {c.capital}"
        chain = (c.capital, c.name)
        yield Question(f"What is the currency of {whose}?", (c.currency,), chain, c.name)
        yield Question(f"On which continent is {whose}?", (c.continent,), chain, c.name)
        if c.language:
            yield Question(f"What is the official language of {whose}?", (c.language,), chain, c.name)
        if c.river:
            title = river_title(c.river)
            answers = tuple(dict.fromkeys((c.river, title)))
            text = f"On which river does the capital of {c.name_in_sentence} lie?"
            yield Question(text, answers, (c.capital, title), c.name)
